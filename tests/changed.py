"""`replace` for dataclasses and msgspec structs alike."""

import dataclasses

import msgspec


def replace(value, **changes):
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **changes)
    return dataclasses.replace(value, **changes)
