"""Errors of process reward models."""

from configs.errors import UserError


class PrmError(UserError):
    """The PRM gave no usable score. The step stays unscored and may be tried again; it is never a zero."""
