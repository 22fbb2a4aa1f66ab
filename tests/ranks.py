"""Processes that stay: one for each rank, in a process group and its subgroups, doing what the tests ask of them.

In: a function of this file by name, and its arguments. Out: what it returns on every rank, or the error it raises.
"""

import functools
import multiprocessing
import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.device_mesh import init_device_mesh

SIZES = (1, 2, 3, 4, 8)
PATIENCE = 120  # seconds the tests wait for an answer


class Ranks:
    """`count` processes, and subgroups of the first 1, 2, 3, 4 and 8 of them."""

    def __init__(self, count, backend, folder, timeout=60):
        self.count, self.backend = count, backend
        self.sizes = [size for size in SIZES if size <= count]
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            arguments = (rank, count, backend, f"file://{folder}/store", timeout, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.run(count, "ready")

    def run(self, size, name, by_rank=None, **arguments):
        """What `name` returns on each of the first `size` ranks; (type name, text) where it raised."""
        for rank in range(size):
            own = by_rank[rank] if by_rank else {}
            self.pipes[rank].send((name, {"size": size, **arguments, **own}))
        found = []
        for rank in range(size):
            if not self.pipes[rank].poll(PATIENCE):
                self.close()
                raise TimeoutError(f"rank {rank} of {size} did not answer {name}")
            found.append(self.pipes[rank].recv())
        return found

    def results(self, size, name, by_rank=None, **arguments):
        """The same where nobody may raise."""
        return self.checked(self.run(size, name, by_rank, **arguments))

    def checked(self, found):
        for rank, answer in enumerate(found):
            assert not isinstance(answer, Raised), f"rank {rank} of {len(found)}:\n{answer.trace}"
        return found

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()


class Raised:
    def __init__(self, error):
        self.kind, self.text, self.trace = type(error).__name__, str(error), traceback.format_exc()


# ---- In the processes -----------------------------------------------------------------------------------------------


def _serve(rank, count, backend, store, timeout, pipe):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=count, timeout=timedelta(seconds=timeout))
    from conftest import REPO_ID
    from kernels import get_kernel

    me = Me(rank, backend, get_kernel(REPO_ID, version=1, trust_remote_code=True))
    for size in SIZES:
        if size <= count:
            me.groups[size] = dist.new_group(list(range(size)), timeout=timedelta(seconds=timeout))
    for shape in sorted({(count // 2 or 1, min(2, count)), (min(2, count), count // 2 or 1), (count, 1)}):
        if shape[0] * shape[1] == count:
            me.meshes[shape] = init_device_mesh(me.device, shape, mesh_dim_names=("context", "heads"))
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(TASKS[name](me, **arguments))
        except Exception as error:
            pipe.send(Raised(error))


class Me:
    def __init__(self, rank, backend, kernel):
        self.rank, self.kernel, self.groups, self.meshes = rank, kernel, {}, {}
        self.device = "cuda" if backend == "nccl" else "cpu"


def ready(me, size):
    return me.rank


def die(me, size):
    os._exit(1)


def refused(me, size, q, k, v, grid=None, **how):
    """A call with these shapes and dtypes; `how` may be what no rank should say."""
    if grid:
        how.update(group=me.meshes[grid]["context"], heads_group=me.meshes[grid]["heads"])
    tensors = [torch.zeros(shape, dtype=getattr(torch, dtype), device=me.device) for shape, dtype in (q, k, v)]
    me.kernel.det_attn_context_parallel(*tensors, **{"group": me.groups[size], **how})


def attend(me, size, inputs, rows, backward=True, named=False, grid=None, **how):
    """Own rows of out, dq, dk, dv for Q, K, V, dO of the whole sequence, which each rank makes anew.

    rows: own (queries, keys), indices into the sequence; named: the layout is one of those with a name.
    """
    q, k, v, dO = whole(inputs, me.device)
    of_q, of_k = (torch.tensor(x, dtype=torch.int64, device=me.device) for x in rows)
    own = [x[:, :, i].requires_grad_(backward) for x, i in ((q, of_q), (k, of_k), (v, of_k))]
    if not named:
        how["layout"] = (of_q, of_k)
    how["group"] = me.groups[size]
    if grid:
        mesh = me.meshes[grid]
        how.update(group=mesh["context"], heads_group=mesh["heads"])
    out = me.kernel.det_attn_context_parallel(*own, **how)
    found = [out.detach().cpu()]
    if backward:
        out.backward(dO[:, :, of_q].to(out.dtype))
        found += [x.grad.cpu() for x in own]
    return [numpy_of(x) for x in found]


@functools.lru_cache(maxsize=1)
def long_problem(me, size, length):
    """q, k, v, dO of 8 heads, and out, dq, dk, dv. Each head is computed by one device alone, the heads by all of them
    at once. Inputs by torch: they are too many to hash."""
    generator = torch.Generator(me.device).manual_seed(0)
    inputs = [torch.randn(1, 8, length, 128, generator=generator, device=me.device).bfloat16() for _ in range(4)]
    heads = list(range(8))[me.rank :: size]
    q, k, v = (x[:, heads].requires_grad_() for x in inputs[:3])
    out = me.kernel.det_attn(q, k, v, True, precision="high", out_dtype=torch.bfloat16)
    out.backward(inputs[3][:, heads])
    own = torch.stack((out.detach(), q.grad, k.grad, v.grad))
    whole = own.new_empty(4, *inputs[0].shape)
    for rank in range(size):
        heads = list(range(8))[rank::size]
        part = own if rank == me.rank else own.new_empty(4, 1, len(heads), length, 128)
        dist.broadcast(part.view(torch.uint8), rank, me.groups[size])
        whole[:, :, heads] = part
    return inputs, whole


def long(me, size, length, method):
    """Names of what differs from one device."""
    (*inputs, dO), expected = long_problem(me, size, length)
    parts = torch.arange(length, device=me.device).tensor_split(2 * size)
    rows = torch.cat((parts[me.rank], parts[-1 - me.rank]))
    own = [x[:, :, rows].requires_grad_() for x in inputs]
    how = dict(layout="zigzag", method=method, precision="high", out_dtype=torch.bfloat16)
    out = me.kernel.det_attn_context_parallel(*own, me.groups[size], True, **how)
    out.backward(dO[:, :, rows])
    found = zip(("out", "dq", "dk", "dv"), (out, *(x.grad for x in own)), expected)
    return [name for name, a, b in found if not torch.equal(a.view(torch.int16), b[:, :, rows].view(torch.int16))]


def torch_context_parallel(me, size, inputs, causal):
    """Inside torch's own context_parallel: it cuts the buffers, and puts the output together again."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    mesh = me.meshes[(size, 1)]["context"]
    q, k, v, _ = whole(inputs, me.device)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        length = q.shape[2]
        out = me.kernel.det_attn_context_parallel(q, k, v, mesh, causal, layout="zigzag")
        (out,) = context_parallel_unshard(mesh, [out], [2])
    return length, numpy_of(out.cpu())


def once_only(me, size, inputs):
    """The gradient of a gradient; then gradients of q alone, and through a checkpoint."""
    q, k, v, dO = whole(inputs, me.device)
    q, k, v, dO = (x[:, :, me.rank :: size] for x in (q, k, v, dO))
    attend = me.kernel.det_attn_context_parallel
    q.requires_grad_()
    out = attend(q, k, v, me.groups[size])
    (dq,) = torch.autograd.grad(out, q, dO, create_graph=True)
    try:
        dq.sum().backward()
        refused = None
    except NotImplementedError as error:
        refused = str(error)
    again = torch.utils.checkpoint.checkpoint(lambda x: attend(x, k, v, me.groups[size]), q, use_reentrant=False)
    (repeated,) = torch.autograd.grad(again, q, dO)
    with torch.no_grad():
        plain = attend(q, k, v, me.groups[size])
    return refused, numpy_of(dq.detach().cpu()), numpy_of(repeated.cpu()), torch.equal(out, plain), plain.requires_grad


def numpy_of(x):
    """Through the pipe as bytes: numpy has no bfloat16."""
    return str(x.dtype).split(".")[1], tuple(x.shape), x.reshape(-1).view(torch.uint8).numpy().tobytes()


def tensor_of(packed):
    dtype, shape, data = packed
    x = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return x.view(getattr(torch, dtype)).view(shape)


def whole(inputs, device="cpu"):
    """Q, K, V of the generators, and a gradient dO that is as wild as they are."""
    from helpers import make

    q, k, v = make(device=device, **inputs)
    dO = make(device=device, **{**inputs, "seed": inputs.get("seed", 0) + 1000})[0]
    return q, k, v, dO


TASKS = {f.__name__: f for f in (ready, die, refused, attend, long, torch_context_parallel, once_only)}
