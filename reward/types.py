"""Errors of process reward models."""

from configs.errors import UserError


class PrmDataError(UserError, ValueError):
    """No PRM can be trained on, or measured with, what was collected or labelled; the message says what to do."""


class PrmError(UserError):
    """The PRM gave no usable score. The step stays unscored and may be tried again; it is never a zero."""
