"""A step's time from its shape: the terms, their fit to a profile, the error of it, and the fit as an executor."""
