"""The flags of runs on many devices, and on several machines."""

import dataclasses
from typing import Annotated

from kvrt.cli.flags.field import Info, Options
from kvrt.errors import UsageError

AUTO = "auto"
_DEVICES = "Devices"
_PROCESSES = "Several processes (each is given the same flags but for --process_id)"
_INT_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFlags(Options):
    """Which devices divide the cache and the weights."""

    mesh: Annotated[
        str | None,
        Info(
            _DEVICES,
            "divide over devices, as in tensor=4,context=2: tensor divides heads and weights, "
            "context the cells, data the tokens of a step and the cells",
            "SIZES",
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshFlags(DeviceFlags):
    """The same, and the processes that have devices."""

    coordinator: Annotated[
        str | None,
        Info(
            _PROCESSES,
            f"where process 0 listens for the others, or {AUTO} where the cluster says (Slurm, "
            "MPI, Cloud TPU)",
            "HOST:PORT",
        ),
    ] = None
    n_processes: Annotated[
        int, Info(_PROCESSES, "how many processes there are", "N", high=_INT_MAX)
    ] = 0
    process_id: Annotated[
        int,
        Info(
            _PROCESSES, "which of them this is; the first, 0, prints and writes", "I", high=_INT_MAX
        ),
    ] = 0

    def check(self) -> None:
        """Refuses processes that are not told where to meet, or have no place among the others."""
        super().check()
        apart = bool(self.n_processes or self.process_id)
        if self.coordinator is None:
            if apart:
                raise UsageError("--n_processes and --process_id need --coordinator HOST:PORT")
            return
        if self.mesh is None:
            raise UsageError("--coordinator joins processes for a mesh; add --mesh")
        if self.coordinator == AUTO:
            if apart:
                raise UsageError(
                    f"--coordinator {AUTO} finds the processes itself; leave out theirs"
                )
            return
        _, _, port = self.coordinator.rpartition(":")
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise UsageError(f"--coordinator {self.coordinator} has no port; HOST:PORT is wanted")
        if self.process_id >= self.n_processes:
            raise UsageError(
                f"--process_id {self.process_id} of --n_processes {self.n_processes}: processes "
                "are numbered from 0"
            )
