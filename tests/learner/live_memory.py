"""Counts the bytes of the tensors that live while something runs on the CPU, as a GPU's allocator would."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveMemory(TorchDispatchMode):
    """`peak` is the most bytes that storages born inside of it held at one time."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # A view of what was there before is not born here.
        tree_map_only(torch.Tensor, lambda tensor: self._known.add(tensor.untyped_storage()), (args, kwargs))
        result = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._born, result)
        return result

    def _born(self, tensor):
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._died, size)

    def _died(self, size):
        self.live -= size
