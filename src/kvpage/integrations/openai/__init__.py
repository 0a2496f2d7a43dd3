"""OpenAI's HTTP API: what it asks, what it is answered, and how errors look."""
