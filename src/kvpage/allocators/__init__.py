"""Allocator strategies: the contract in `base`, one built-in strategy a module."""
