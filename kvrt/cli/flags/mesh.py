"""The flags of runs on many devices, and on several machines."""

import functools

from kvrt.errors import UsageError
from kvrt.files.named import NamedFile
from kvrt.options.option import Options, flag, flag_group

AUTO = "auto"
_devices = functools.partial(flag, "Devices", advanced=True)
_processes = functools.partial(
    flag, "Several processes (each is given the same flags but for --process_id)", advanced=True
)


@flag_group
class DeviceFlags(Options):
    """Which devices divide the cache and the weights."""

    mesh: str | None = _devices(
        None,
        "divide over devices, as in tensor=4,context=2: tensor divides heads and weights, "
        "context the cells",
        "SIZES",
    )


@flag_group
class MeshFlags(DeviceFlags):
    """The same, and the processes that have devices."""

    coordinator: str | None = _processes(
        None,
        f"where process 0 listens for the others, or {AUTO} where the cluster says (Slurm, "
        "MPI, Cloud TPU)",
        "HOST:PORT",
    )
    n_processes: int = _processes(0, "how many processes there are", "N")
    process_id: int = _processes(0, "which of them this is; the first, 0, prints and writes", "I")

    def files(self) -> list[NamedFile]:
        """As `Options.files`; none of a process that is not the first."""
        return [] if self.process_id else super().files()

    def check(self) -> None:
        """Refuses processes that have no place to meet, or have no place among the others."""
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
