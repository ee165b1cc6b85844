"""The one exception that a person at the command line is meant to read."""


class UserError(Exception):
    """Something the user gave is wrong; the message is one line that says what, and how to mend it."""

    def __init__(self, message: str):
        """Join the message into one line, whatever line breaks a cause's own words had."""
        super().__init__(" ".join(message.split()))
