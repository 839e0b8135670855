"""Published adapters on disk: every version once, its digest for ever, the newest bytes as long as they are needed."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from configs.errors import UserError
from configs.wording import reason
from rollout.records import append_record, read_records
from rollout.store.disk import partial_of, sweep_partials, sync

KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAdapter:
    """A version of the policy and the sha256 of its bytes."""

    policy_version: int
    digest: str


class AdapterMismatchError(UserError):
    """An engine does not sample with what the learner published. Nothing sampled like that can be trusted."""


class AdapterStoreError(UserError):
    """An adapter could not be written; the message says where, why and what to do."""


class AdapterStore:
    """One writer. A version number that was ever published is never given out again, whatever crashed since."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = folder / "index.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        sweep_partials(folder)
        self._published: list[PublishedAdapter] = []
        if self._index.exists():
            self._published = [PublishedAdapter(**row) for row in read_records(self._index)]
        # A writer that died after it wrote the bytes and before their line has left them without a version.
        known = {self._file(one) for one in self._published[-KEPT:]}
        for file in folder.glob("v*.safetensors"):
            if file not in known:
                file.unlink(missing_ok=True)

    @property
    def newest(self) -> PublishedAdapter | None:
        return self._published[-1] if self._published else None

    @property
    def next_version(self) -> int:
        """The lowest number that was never used."""
        return self._published[-1].policy_version + 1 if self._published else 0

    @property
    def num_published(self) -> int:
        return len(self._published)

    def find(self, policy_version: int) -> PublishedAdapter | None:
        return next((one for one in reversed(self._published) if one.policy_version == policy_version), None)

    def publish(self, published: PublishedAdapter, data: bytes) -> None:
        """Write the bytes, then the version's line, both synced: a version that is listed is whole. The very same may
        be published again. Raises ValueError when the number is not new or the bytes are not what the digest says."""
        digest = hashlib.sha256(data).hexdigest()
        if digest != published.digest:
            raise ValueError(f"version {published.policy_version}: sha256 {digest[:12]} != {published.digest[:12]}")
        if self.newest and published.policy_version <= self.newest.policy_version:
            if published == self.newest:
                return
            raise ValueError(
                f"version {published.policy_version} was published before; the next is {self.next_version}"
            )
        file = self._file(published)
        partial = partial_of(file)
        try:
            partial.write_bytes(data)
            sync(partial)
            partial.rename(file)
            append_record(self._index, asdict(published))
            sync(self._index)
            sync(self._folder)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise AdapterStoreError(
                f"cannot write version {published.policy_version} to '{self._folder}': {error.strerror or error}; free "
                "some space there and resume the run"
            ) from error
        self._published.append(published)
        for old in self._published[:-KEPT]:
            self._file(old).unlink(missing_ok=True)

    def read(self, published: PublishedAdapter) -> bytes:
        """The bytes of a version that is kept still. Raises AdapterMismatchError when they changed on disk, or are
        gone."""
        try:
            data = self._file(published).read_bytes()
        except OSError as error:
            raise AdapterMismatchError(
                f"{self._file(published)} was published and is not there: {reason(error)}"
            ) from error
        digest = hashlib.sha256(data).hexdigest()
        if digest != published.digest:
            raise AdapterMismatchError(
                f"{self._file(published)}: sha256 {digest[:12]}, published was {published.digest[:12]}"
            )
        return data

    def _file(self, published: PublishedAdapter) -> Path:
        return self._folder / f"v{published.policy_version:06d}-{published.digest[:8]}.safetensors"
