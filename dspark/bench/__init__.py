"""Comparing a recipe with decoding alone and with other programs, fairly: `dspark bench`."""
