"""What a step judge answered, written down as soon as it is paid for, so that nothing is paid twice."""

from dataclasses import asdict
from pathlib import Path
from typing import Literal, NamedTuple

from reward.openai_chat import Bill
from reward.verdict import Verdict, parse_verdict
from rollout.records import append_record, read_records

SCHEMA = 1

View = Literal["blind", "hindsight"]


class VerdictKey(NamedTuple):
    """What was asked of whom. The request's digest covers the whole prompt and the temperature."""

    text_digest: str
    view: View
    vote: int
    request_sha: str
    model: str


Paid = tuple[Verdict, Bill]


class Receipts:
    """Replies that were paid for, understood or not, in append-only JSON lines that are flushed one by one.

    `spent` is the bill of the file, which one process at a time may use. Raises ValueError for another schema.
    """

    def __init__(self, path: Path) -> None:
        # Before the first request: that a file cannot be written must not be found out after paying.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.path = path
        self.spent = Bill()
        self._verdicts: dict[VerdictKey, Paid] = {}
        for row in read_records(path):
            if row.pop("schema") != SCHEMA:
                raise ValueError(f"{path} holds receipts of another schema than {SCHEMA}; use a new file")
            key = VerdictKey(*(row.pop(name) for name in VerdictKey._fields))
            self._keep(key, row.pop("text"), Bill(**row))

    def get(self, key: VerdictKey) -> Paid | None:
        """The verdict and its bill, if it was paid for before."""
        return self._verdicts.get(key)

    def add(self, key: VerdictKey, text: str, bill: Bill) -> None:
        """Write down a reply; the text is empty when it was lost."""
        # A reply may hold half a surrogate pair, which no file can.
        text = text.encode(errors="replace").decode()
        append_record(self.path, {"schema": SCHEMA, **key._asdict(), "text": text, **asdict(bill)})
        self._keep(key, text, bill)

    def _keep(self, key: VerdictKey, text: str, bill: Bill) -> None:
        self.spent += bill
        verdict = parse_verdict(text)
        if verdict is not None:
            self._verdicts[key] = (verdict, bill)
