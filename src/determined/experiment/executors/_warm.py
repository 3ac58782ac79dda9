"""The runner's side of the warm process."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence

from determined.experiment.executors._environment import SERVER_VARIABLE
from determined.experiment.executors._server import CLASS, SCRIPT

# This library is found where it is found here, whatever the variables of a run say about the way.
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from determined.experiment.executors._server import main; main()"
_LIBRARY = str(pathlib.Path(__file__).parents[3])
_MOST_WORDS = 4096
# Whatever library may ask for GPUs there gets an answer for which CUDA, which no fork survives, is left alone.
_NO_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class WarmProcess:
    """A process that forks keepers. It ends by itself when this one does, or lets go of it."""

    def __init__(self, environment: Mapping[str, str], libraries: Sequence[str] = ()) -> None:
        self.environment = dict(environment)
        """With which libraries were loaded there."""
        self.token = uuid.uuid4().hex
        self._last = ""
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _PROGRAM, _LIBRARY, *libraries, str(theirs.fileno())],
                env={**self.environment, **_NO_CUDA, SERVER_VARIABLE: self.token},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork_keeper(self, link: socket.socket, *, of_class: bool) -> None:
        """Have a keeper forked that holds `link`; raises OSError if the process is gone."""
        socket.send_fds(self.control, [CLASS if of_class else SCRIPT], [link.fileno()])

    @property
    def last_words(self) -> str:
        """The last line that it wrote, which says why it could not work."""
        if not self._words.closed:
            # Not by reading on, as where to read is where the other process writes.
            file = self._words.fileno()
            text = os.pread(file, _MOST_WORDS, max(0, os.fstat(file).st_size - _MOST_WORDS))
            lines = text.decode(errors="replace").split("\n")
            self._last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return self._last

    def close(self, timeout_s: float = 0.0) -> None:
        """Let it end, as it does when its last keeper has ended; wait up to `timeout_s` seconds for that."""
        self._last = self.last_words
        self.control.close()
        self._words.close()
        waiting = threading.Thread(target=self._process.wait, daemon=True)  # so that it is no zombie afterwards
        waiting.start()
        waiting.join(timeout_s)
