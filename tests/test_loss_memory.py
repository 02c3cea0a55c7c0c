"""What linear_cross_entropy holds at once: the logits of one chunk, and gradients.

Bytes are counted as they are allocated, by every operation of torch that runs: a peak is the most
that was alive at one time, less what was there before.
"""

import pytest
import torch
from loss_options import each_form, oracle
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cadenza as cz
from cadenza.library.cross_entropy import _call, _chunk
from cadenza.library.loss_batch import ALONE, FIRST, LATER, Batch

WIDTH, CLASSES, CHUNK = 4, 200, 8
NUMBER = 8  # bytes
LOGITS = CHUNK * CLASSES * NUMBER  # of a chunk of rows, or of CLASSES rows and a chunk of classes
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Allocated(TorchDispatchMode):
    """Keeps count of the bytes of tensors that operations return and that are alive."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in known}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "cadenza":
            with self:  # so that what it runs is seen, operation by operation
                return function.redispatch(CPU, *args, **(kwargs or {}))
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self.known:
                    self.alive[reference.cdata] = reference, storage.nbytes()
        self.alive = {k: (r, size) for k, (r, size) in self.alive.items() if not r.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return results


def peak(rows, function=cz.ops.linear_cross_entropy, classes=CLASSES, **options):
    """The most bytes of a call, forward and backward, beside its operands."""
    x = torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True)
    w = torch.randn(classes, WIDTH, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, classes, (rows,))
    with Allocated(x, w, target) as allocated:
        function(x, w, target, **options).sum().backward()
    return allocated.peak


def gradients(rows, classes=CLASSES):
    """The bytes of dx and dw."""
    return (rows + classes) * WIDTH * NUMBER


def test_the_count_sees_the_logits_of_stock():
    rows = 64
    assert peak(rows, oracle) >= 2 * rows * CLASSES * NUMBER + gradients(rows)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0}])
@pytest.mark.slow
def test_logits_of_one_chunk_of_rows_alive(terms, reduction):
    """More rows cost what a row's gradient and statistics do, whatever their number of logits."""
    options = {"reduction": reduction, "chunk": CHUNK, **terms}
    one, few, many = (peak(rows, **options) for rows in (CHUNK, 2 * CHUNK, 6 * CHUNK))
    own = (3 * WIDTH + 16) * NUMBER  # of a row: gradients, and some numbers
    assert few - one <= CHUNK * own < LOGITS // 4
    assert many - few <= 4 * CHUNK * own
    assert many >= LOGITS


@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0}])
def test_logits_of_one_chunk_of_classes_alive(terms):
    """More classes cost what their rows of dw do, whatever the number of tokens."""
    options = {"lean": True, "chunk": CHUNK, **terms}
    one, few, many = (peak(CLASSES, classes=n, **options) for n in (CHUNK, 2 * CHUNK, 6 * CHUNK))
    own = (2 * WIDTH + 4) * NUMBER  # of a class: gradients, and some numbers
    assert few - one <= CLASSES * 4 * NUMBER + CHUNK * own < LOGITS  # some statistics of the rows
    assert many - few <= 4 * CHUNK * own
    assert many >= LOGITS


@each_form
def test_forward_leaves_little_behind(lean):
    """The default form keeps both gradients, the lean one a few numbers a row."""
    rows = 64
    x = torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True)
    w = torch.randn(CLASSES, WIDTH, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, CLASSES, (rows,))
    with Allocated(x, w, target) as allocated:
        loss = cz.ops.linear_cross_entropy(x, w, target, lean=lean, chunk=CHUNK)
        torch.zeros(1)  # an operation after which what is dead is gone
    kept = sum(size for _, size in allocated.alive.values())
    assert loss.requires_grad
    assert kept <= (0 if lean else gradients(rows)) + rows * 8 * NUMBER


def test_as_many_rows_as_cost_no_more_are_one_chunk():
    """Logits of D rows more are what dw in float32 would take besides."""
    w, most = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta"), 8192
    for rows, size in ((1, most), (most, most), (most + 1, 4096)):
        assert _chunk(torch.empty(rows, device="meta"), w, False) == size
    assert _chunk(torch.empty(most, device="meta"), w.float(), False) == 4096
    assert _chunk(torch.empty(most, device="meta"), w, True) == 2**26 // most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_of_w_that_is_one_chunk_is_rounded_where_it_is_made(dtype):
    """And gradients of several chunks are added up in float32."""
    x, w = torch.randn(24, 8, dtype=dtype), torch.randn(40, 8, dtype=dtype)
    batch = Batch([x, w, torch.randint(0, 40, (24,))], _call(("x", "w", "target"), (), None))
    alone, first, later = (batch.sums(p, 7) for p in (slice(0, 24), slice(0, 8), slice(8, 24)))
    assert alone is (ALONE if dtype == torch.bfloat16 else FIRST)
    assert (first, later) == (FIRST, LATER)
    assert batch.sums(slice(8, 24), 0) is ALONE
