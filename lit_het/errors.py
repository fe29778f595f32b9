"""The one exception for mistakes a user can mend; the CLI prints it as one line without a traceback."""


class UserError(Exception):
    """Bad input, configuration or file; the message names the culprit and the way out."""
