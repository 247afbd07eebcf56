"""Measure, predict and reduce the memory that training takes: the code behind the notebooks."""
