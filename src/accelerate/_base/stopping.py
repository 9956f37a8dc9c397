"""What a launcher and its workers know of each other when a run is asked to stop."""

from __future__ import annotations

EXIT_CODE = 75
"""The exit code of a run that was stopped and goes on when it is started again; `EX_TEMPFAIL` of sysexits.h."""
STOP_FOLDER = "ACCELERATE_STOP_FOLDER"
"""Names the folder in which a worker that listens for signals leaves a file named by its process id."""
STOPPED = "stopped"
"""In the same folder, the file that says that workers ended with the code above."""
