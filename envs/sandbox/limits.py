"""Resource limits of one code process."""

import resource

from envs.sandbox.settings import SandboxSettings

_MIB = 1 << 20


def apply_limits(settings: SandboxSettings) -> None:
    """Hard equals soft: the code cannot raise them. NPROC only counts because nobody is not root."""
    for kind, limit in (
        (resource.RLIMIT_CPU, settings.max_cpu_s),
        (resource.RLIMIT_AS, settings.memory_mb * _MIB),
        (resource.RLIMIT_FSIZE, settings.max_file_mb * _MIB),
        (resource.RLIMIT_NOFILE, settings.max_open_files),
        (resource.RLIMIT_STACK, 16 * _MIB),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        _, ceiling = resource.getrlimit(kind)
        bound = limit if ceiling == resource.RLIM_INFINITY else min(limit, ceiling)
        resource.setrlimit(kind, (bound, bound))
