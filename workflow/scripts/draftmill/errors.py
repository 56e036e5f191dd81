"""The one error that is meant for a person."""


class UserError(Exception):
    """A fault the user can act on: one sentence that says what is wrong, where, and what to do."""
