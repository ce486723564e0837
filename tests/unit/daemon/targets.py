"""What children of fork servers run in these tests."""

import os
from pathlib import Path


def place(channel, argument):
    """Sends the working folder and a variable of the child, or the process id of its parent."""
    own = [str(Path.cwd()), os.environ.get("SSH_AUTH_SOCK")]
    channel.send({"place": os.getppid() if argument == "parent" else own})
    return 0
