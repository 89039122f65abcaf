"""Measurements behind the defaults and the results pages."""
