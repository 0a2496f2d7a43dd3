"""Finds the settings of an engine for a trace, a model and a machine.

Closed form, simulation, then measurement: each is dearer and surer than the one before, and sees
fewer candidates.
"""
