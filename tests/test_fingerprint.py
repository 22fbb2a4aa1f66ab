"""examples/fingerprint.py: it prints what the golden hashes say, and names the first boundary that differs.

In: calls saved with safetensors. Its comparison is tested with reports in which one boundary was changed.
"""

import json
import subprocess
import sys

import pytest
import torch

import oracle
from conftest import ROOT
from helpers import make, sha256, tensor
from test_golden import fixtures, golden, inputs_of

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

sys.path.insert(0, str(ROOT / "examples"))
import fingerprint  # noqa: E402

SETTINGS = dict(
    causal=True, scale=None, precision="highest", q_offset=None, window=[-1, -1], softcap=0.0, dropout_p=0.0,
    dropout_seed=0,
)  # fmt: skip


def script(*arguments, status=0):
    """What the script printed, run as a person would."""
    command = [sys.executable, ROOT / "examples/fingerprint.py", *arguments]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd="/")
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def call(tmp_path):
    """A saved call with gradients."""
    Q, K, V = make("normal", seed=5, B=2, heads=(4, 2), Sq=9, Skv=21, D=24)
    dO = make("normal", seed=6, B=2, heads=(4, 4), Sq=9, Skv=9, D=24)[0]
    path = tmp_path / "call.safetensors"
    save_file({"Q": Q, "K": K, "V": V, "dO": dO}, path)
    return path


@pytest.mark.parametrize("name", ["special-highest", "normal-bfloat16", "widest"])
def test_the_hashes_are_the_golden_ones(kernel, device, name, tmp_path):
    source, settings = fixtures()[name]
    Q, K, V = inputs_of(source)
    save_file({"Q": Q, "K": K, "V": V}, tmp_path / "call.safetensors")
    settings = {**SETTINGS, "q_offset": None, **settings}
    found = fingerprint.report(kernel, tmp_path / "call.safetensors", device, settings)["boundaries"]
    known = golden()[name]
    for boundary in ("rowmax", "NUM", "DEN", "out"):
        assert found[boundary] == known[boundary]
    assert found["fused out"] == known["out"]
    for x in "QKV":
        assert found[f"input: {x}"] == known[x]
        assert found[f"rows: {x} integers"] == known[f"rows({x}).integers"]
        assert found[f"rows: {x} exponents"] == known[f"rows({x}).exponents"]


def test_with_an_output_gradient_every_boundary_of_the_backward_pass_is_there(kernel, device, call):
    found = fingerprint.report(kernel, call, device, SETTINGS)["boundaries"]
    names = ["rows: dO integers", "rows: dO exponents"]  # first: all that follows is made of them
    names += [f"reference: {x}" for x in "ABC"] + [f"sum: d{x}" for x in "QKV"]
    names += [f"{kind}: d{x}" for kind in ("gradient", "backward") for x in "QKV"]
    assert list(found)[-14:] == names
    rows = oracle.rows(load_file(call)["dO"], "key", None, "highest")
    assert [found[name] for name in names[:2]] == [sha256(tensor(x)) for x in rows]
    assert [found[f"gradient: d{x}"] for x in "QKV"] == [found[f"backward: d{x}"] for x in "QKV"]
    assert all(b.split(":")[0] in fingerprint.MEANING for b in found)


def test_two_runs_of_the_script_compare_equal(kernel, call, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(fingerprint.report(kernel, call, "cpu", SETTINGS)))
    printed = script(call, "--causal", "--json", tmp_path / "b.json")
    lines = dict(line.rsplit(None, 1) for line in printed.splitlines())
    assert lines == json.loads((tmp_path / "b.json").read_text())["boundaries"]
    assert "the same bytes at all" in script("--compare", tmp_path / "a.json", tmp_path / "b.json")


@pytest.fixture(scope="module")
def found(kernel):
    return {
        "contract": 1, "where": {}, "settings": SETTINGS, "shapes": {},
        "boundaries": {f"{kind}: {x}": kind + x for kind in fingerprint.MEANING for x in "12"},
    }  # fmt: skip


def test_the_first_difference_is_named_whatever_follows(found):
    names = list(found["boundaries"])
    for i, name in enumerate(names):
        other = {**found, "boundaries": {n: v + "!" * (j >= i) for j, (n, v) in enumerate(found["boundaries"].items())}}
        text, same = fingerprint.compare(found, other)
        assert not same and text.splitlines()[0] == f"first difference: {name}"
        assert fingerprint.MEANING[name.split(":")[0]] in text
        assert text.splitlines()[4].count(":") == i + 1


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"settings": {**SETTINGS, "causal": False}}, "not the same call: settings"),
        ({"contract": 2}, "not the same call: contract"),
        ({"shapes": {"Q": ["float32", 1, 1, 1, 1]}}, "not the same call: shapes"),
        ({"boundaries": {"out": ""}}, "not the same boundaries"),
    ],
)
def test_reports_of_different_calls_are_told_apart(found, changed, said):
    text, same = fingerprint.compare(found, {**found, **changed})
    assert said in text and not same


def test_a_changed_input_is_found_at_the_input(kernel, call, tmp_path):
    first = fingerprint.report(kernel, call, "cpu", SETTINGS)
    Q, K, V = make("normal", seed=5, B=2, heads=(4, 2), Sq=9, Skv=21, D=24)
    V[0, 0, 20, 3] = V[0, 0, 20, 3].nextafter(torch.tensor(9.0))
    dO = make("normal", seed=6, B=2, heads=(4, 4), Sq=9, Skv=9, D=24)[0]
    save_file({"Q": Q, "K": K, "V": V, "dO": dO}, tmp_path / "other.safetensors")
    text, same = fingerprint.compare(first, fingerprint.report(kernel, tmp_path / "other.safetensors", "cpu", SETTINGS))
    assert text.splitlines()[0] == "first difference: input: V" and not same
    assert "rowmax" not in text.splitlines()[-1], "a changed value cannot reach the row maxima"


@pytest.mark.parametrize("change", [
    {"window": [3, 0]}, {"softcap": 0.5}, {"dropout_p": 0.5}, {"dropout_p": 0.5, "dropout_seed": 1},
    {"attn_bias": torch.linspace(-1, 1, 21)[None]}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    {"key_ranges": torch.tensor([[2, 20]] * 9, dtype=torch.int32)[None]},
])  # fmt: skip
def test_every_modifier_reaches_the_stages_and_the_fused_call(kernel, device, call, tmp_path, change):
    settings = {**SETTINGS, **{n: v for n, v in change.items() if n in SETTINGS}}
    tensors = {n: x for n, x in load_file(call).items() if n != "dO"}
    plain, changed = tmp_path / "plain.safetensors", tmp_path / "changed.safetensors"
    save_file(tensors, plain)
    save_file({**tensors, **{n: v for n, v in change.items() if n not in SETTINGS}}, changed)
    before = fingerprint.report(kernel, plain, device, SETTINGS)["boundaries"]
    after = fingerprint.report(kernel, changed, device, settings)["boundaries"]
    assert after["out"] == after["fused out"] != before["out"]
    assert (after["rowmax"] == before["rowmax"]) == ("dropout_p" in change)


@pytest.fixture
def refused(monkeypatch, capsys):
    """What the script says of these arguments, and nothing else: the status is 2, as 1 says that two reports differ."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fingerprint.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            fingerprint.main()
        printed = capsys.readouterr()
        assert (stopped.value.code, printed.out) == (2, "")
        return printed.err

    return run


@pytest.mark.parametrize(
    "tensors, said",
    [
        (("Q", "k"), "has no tensor named K, V, only Q, k"),
        (("Q", "K", "V", "bias"), "has a tensor named bias, allowed are Q, K, V, dO, attn_bias, alibi_slopes, key_ran"),
        (("Q", "K", "V", "dO", "dropout", "mask"), "has a tensor named dropout, mask, allowed are Q, K, V, dO,"),
    ],
)
def test_a_file_with_other_tensors_is_refused_by_their_names(refused, tmp_path, tensors, said):
    """A tensor that was left out would leave the hashes of another call."""
    save_file({name: torch.zeros(1, 1, 1, 1) for name in tensors}, tmp_path / "x.safetensors")
    assert f"{tmp_path / 'x.safetensors'}: {said}" in refused(tmp_path / "x.safetensors")


ZEROS = {name: torch.zeros(1, 1, 2, 4) for name in ("Q", "K", "V", "dO")}


@pytest.mark.parametrize(
    "change, options, said",
    [
        ({name: x.double() for name, x in ZEROS.items()}, (), "no call of det_attn: Q: got dtype torch.float64"),
        ({"dO": ZEROS["dO"].double()}, (), "no call of det_attn: dO: got dtype torch.float64"),
        ({"K": torch.zeros(1, 1, 2, 5)}, (), "no call of det_attn: K: got shape (1, 1, 2, 5)"),
        ({"attn_bias": torch.zeros(3)}, (), "no call of det_attn: attn_bias: got shape (3,)"),
        ({}, ("--scale", "nan"), "no call of det_attn: scale: got nan"),
        ({}, ("--window", "-2", "0"), "no call of det_attn: window: got (-2, 0)"),
        ({}, ("--dropout-p", "2"), "no call of det_attn: dropout_p: got 2.0"),
        ({}, ("--device", "meta"), "--device: got meta, must be cpu, or one of"),
        ({}, ("--device", "cuda:99"), "--device: got cuda:99, must be cpu, or one of"),
        ({}, ("--device", "nowhere"), "argument --device: "),
        ({}, ("--json", "/nowhere/at/all.json"), "--json: got /nowhere/at/all.json, must be a file in a folder"),
        ({}, ("--json", "/"), "--json: got /, must be a file in a folder"),
    ],
    ids=lambda x: None if isinstance(x, str) else " ".join(x) or "file",
)
def test_what_is_no_call_is_refused_by_its_argument(refused, tmp_path, change, options, said):
    save_file({**ZEROS, **change}, tmp_path / "x.safetensors")
    assert said in refused(tmp_path / "x.safetensors", *options)


@pytest.mark.parametrize("text", [None, "", "not a file of tensors"])
def test_a_file_that_is_not_of_tensors_is_refused(refused, tmp_path, text):
    path = tmp_path / "x.safetensors"
    if text is not None:
        path.write_text(text)
    assert refused(path).startswith(f"{path}: not a readable .safetensors file: ")


@pytest.mark.parametrize(
    "change, said",
    [
        (None, "No such file"),
        (b"{", "Expecting property name"),
        (b"\xff\xfe", "can't decode byte"),
        (b"[]", "lacks contract, where, settings, shapes, boundaries"),
        (b'{"contract": 1}', "lacks where, settings, shapes, boundaries"),
        (dict(shapes=None), "lacks shapes"),
        (dict(boundaries={"out": "", "LSE": ""}), "LSE is no boundary of it"),
        (dict(boundaries={}), "its boundaries are no hashes"),
        (dict(boundaries={"out": None}), "its boundaries are no hashes"),
    ],
)
def test_what_is_no_report_is_refused_by_name(refused, found, tmp_path, change, said):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(found))
    if change is not None:
        bad.write_bytes(change if isinstance(change, bytes) else json.dumps({**found, **change}).encode())
    for reports in ((good, bad), (bad, good)):
        printed = refused("--compare", *reports)
        assert printed.startswith(f"{bad}: not a report of this script: ") and said in printed, printed
