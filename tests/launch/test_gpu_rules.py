"""What is decided for GPUs without one: where workers lie, what they may wait for, what compiling needs, what a user is
told. `torch.cuda` is a stand-in where it matters.
"""

import ast
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_for_tests import build_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from two_gpus import NewTensors, on_gpu, two_gpus

import ppd_runtime
from benchmarks import hop
from ppd_runtime import OrdinaryDecoding, PPDRuntime, RuntimeConfig
from ppd_runtime.launch.gpus import assign_gpus
from ppd_runtime.launch.worker_specs import worker_specs
from ppd_runtime.models.checkpoint.config import without_weights
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.dtype import choose_device
from ppd_runtime.models.compiled import export, programs, toolkit
from ppd_runtime.models.compiled.compiler_options import compiler_options
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.pipeline.messages import ExitState
from ppd_runtime.pipeline.wire import encode
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.layouts import DECIDER
from ppd_runtime.tune.ways import core_beside

PACKAGE = Path(ppd_runtime.__file__).parent


@pytest.mark.usefixtures("gpu_seen")
def test_workers_of_gpus_stay_on_no_core(model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of CUDA, NCCL and ZeroMQ would share it with one that looks for messages."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    specs = {}
    for device in ("cpu", "cuda"):
        runtime = PPDRuntime(model_folder("llama"), device=device, k=1, launcher="processes")
        specs[device] = runtime._specs
        runtime.close()
    assert all(spec.cores for spec in specs["cpu"])
    assert [(spec.device, spec.cores) for spec in specs["cuda"]] == [("cuda:0", ()), ("cuda:1", ())]


def test_nobody_who_measures_for_gpus_stays_on_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As their workers do not: the benchmark of messages, the comparison of methods."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    cores: dict[str, list[tuple[int, ...]]] = {"cpu": [], "cuda:0": []}
    monkeypatch.setattr(
        hop, "departures", lambda series, folder, own: (cores[series.device].append(own), [[0.0] * 25] * 2)[1]
    )
    monkeypatch.setattr(hop, "arrivals", lambda series, folder, own: (cores[series.device].append(own), [0.0] * 25)[1])
    for device, found in cores.items():
        with ThreadPoolExecutor(1) as pool:
            hop._row(hop.Series("unix", 8, 1, 5, device), pool)
        config, stage = RuntimeConfig(), SimpleNamespace(device=torch.device(device))
        ordinary: Any = SimpleNamespace(config=config, stage=stage)
        found.append(core_beside(ordinary))
    assert [len(some) for some in cores["cpu"]] == [1] * 3
    assert cores["cuda:0"] == [()] * 3


@pytest.mark.parametrize(
    ("workers", "gpus", "each", "found"),
    [(2, 2, None, "01"), (4, 2, None, "0101"), (4, 2, 0.5, "0101"), (2, 2, 1, "01"), (3, 1, 0.3, "000")],
)
def test_workers_share_gpus_unless_they_are_told_not_to(
    workers: int, gpus: int, each: float | None, found: str
) -> None:
    assert assign_gpus(workers, gpus, each) == [f"cuda:{number}" for number in found]


@pytest.mark.parametrize(("each", "needed"), [(1, 3), (0.5, 2), (2, 6)])
def test_more_workers_than_gpus_may_have_are_refused(each: float, needed: int) -> None:
    line = rf"^gpus_per_worker={each}: 3 workers need {needed} GPUs, and there are 1: choose .*$"
    with pytest.raises(ValueError, match=line):
        assign_gpus(3, 1, each)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_shares_of_gpus_are_for_workers_that_may_be_on_any(device: str) -> None:
    line = rf"^gpus_per_worker=1 with device='{device}', where all workers are: drop it, or choose device cuda$"
    with pytest.raises(ValueError, match=line):
        RuntimeConfig(device=device, gpus_per_worker=1)


@pytest.mark.usefixtures("gpu_seen")
@pytest.mark.parametrize("interface", [None, "10.0.0.1"])
def test_a_particular_gpu_is_not_for_workers_of_ray(model_folder: Callable[..., Path], interface: str | None) -> None:
    """They would all be on it, or not see it, whatever Ray gave them."""
    config = RuntimeConfig(device="cuda:1", dtype="float32", bind_interface=interface)
    info = describe(str(model_folder("llama")))
    with pytest.raises(ValueError, match=r"^device='cuda:1' with Ray, which gives each .*: choose device cuda, or .*$"):
        worker_specs(config, "ray", info, 2, {}, None)
    assert {spec.device for spec in worker_specs(config, "processes", info, 2, {}, None)} == {"cuda:1"}


@pytest.mark.usefixtures("gpu_seen")
def test_a_gpu_is_not_chosen_for_weights_of_few_bits(model_folder: Callable[..., Path]) -> None:
    """Their products run on CPUs: to be told that by a user who named no device would be no help."""
    folder = model_folder("llama")
    runtime = PPDRuntime(folder, weights="int8", launcher="processes")
    assert runtime.device == "cpu"
    runtime.close()
    assert OrdinaryDecoding(folder, weights="int8").stage.device.type == "cpu"
    with pytest.raises(
        ValueError, match=r"^device='cuda:0' with weights='int8', whose products run on CPUs: drop one$"
    ):
        OrdinaryDecoding(folder, weights="int8", device="cuda:0")


@pytest.mark.usefixtures("gpu_seen")
def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cuda:1") == "cuda:1"
    with pytest.raises(ValueError, match=r"^device='cuda:2': PyTorch sees 2 GPUs here; choose cuda:0 to cuda:1, .*$"):
        choose_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"^device='cuda:1': PyTorch sees one GPU here; choose cuda:0, or cuda$"):
        choose_device("cuda:1")


def test_a_missing_toolkit_is_named_before_anything_is_compiled(
    gpu_seen: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = build_model("llama").config
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    line = r"^compile: code for GPUs needs Triton, which is not installed: .* or leave compile out$"
    with pytest.raises(ValueError, match=line):
        export.compile_layers(config, torch.bfloat16, torch.device("cuda"))
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", lambda name: "found" if name == "triton" else None)
    line = r"^compile: code for GPUs needs a CUDA toolkit, and there is no include/cuda.h in CUDA_HOME=None: .*$"
    with pytest.raises(ValueError, match=line):
        export.compile_layers(config, torch.bfloat16, torch.device("cuda"))
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cuda.h").touch()
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    toolkit.check_toolkit()


@pytest.mark.usefixtures("gpu_seen")
def test_a_missing_toolkit_is_named_before_anything_is_loaded_or_started(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("runtime.start_workers", "methods.in_process.load_stage"):
        monkeypatch.setattr(f"ppd_runtime.{name}", lambda *_: pytest.fail("too early"))
    settings = {"device": "cuda", "compile": True, "dtype": "bfloat16"}
    line = pytest.raises(ValueError, match=r"^compile: code for GPUs needs Triton, .* or leave compile out$")
    for layout in ({"launcher": "processes"}, {"launcher": "ray"}, {"transport": "local"}, {"stages": 2}):
        with contextlib.closing(PPDRuntime(model_folder("llama"), **layout, **settings)) as runtime, line:
            runtime.start()
    with line:
        OrdinaryDecoding(model_folder("llama"), **settings)


@pytest.mark.parametrize(("passes", "dtype"), [(1, torch.float32), (PassKind.SEVERAL, torch.bfloat16)])
def test_attention_may_ask_for_rows_in_eights(passes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA's does of a mask: where it is not known that their number is a multiple, the export is refused."""
    config, attend = build_model("llama", num_layers=2).config, export.grouped_attention

    def asks(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if mask is not None and key.shape[2] % 8:
            mask = nn.functional.pad(mask, [0, 8 - key.shape[2] % 8])
        return attend(module, query, key, value, mask, **kwargs)

    monkeypatch.setattr(export, "grouped_attention", asks)
    monkeypatch.setattr(export.native, "is_available", lambda device, dtype: False)
    make = lambda: export.layer_for(without_weights(config, dtype), 0, passes)  # noqa: E731
    program = export._export(make, 0, None, dtype, torch.device("cpu"), passes)
    rows = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"][2].shape[0]
    assert rows.node.expr.as_coeff_Mul()[0] == 8


ODD_ARITHMETIC = """
torch.backends.fp32_precision = "tf32"
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
torch.backends.cudnn.conv.fp32_precision = "ieee"
products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = (False, False)
products.allow_fp16_accumulation = True
for name in ("flash", "mem_efficient", "math"):
    getattr(cuda, f"enable_{name}_sdp")(False)
cuda.allow_fp16_bf16_reduction_math_sdp(True)
"""
FOUND_ARITHMETIC = """
print(products.fp32_precision in ("ieee", "none"), torch.backends.mkldnn.matmul.fp32_precision in ("ieee", "none"))
print(torch.backends.cudnn.conv.fp32_precision, products.allow_fp16_accumulation)
print(products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction)
print(*(getattr(cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")))
print(cuda.fp16_bf16_reduction_math_sdp_allowed())
"""


def arithmetic_of(program: str) -> list[str]:
    """What a fresh process says of its arithmetic behind a program."""
    imports = "import torch\nfrom ppd_runtime.models.stage.arithmetic import settle_arithmetic\n"
    given = "cuda, products = torch.backends.cuda, torch.backends.cuda.matmul\n"
    source = f"{imports}{given}{program}\n{FOUND_ARITHMETIC}"
    return subprocess.check_output([sys.executable, "-c", source], text=True).splitlines()


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="PyTorch has no such settings")
def test_what_a_program_has_made_of_pytorchs_settings_changes_no_bits() -> None:
    """Workers are fresh processes, ordinary decoding runs in the program's."""
    fresh = arithmetic_of("cuda.enable_cudnn_sdp(False)")
    odd = arithmetic_of(ODD_ARITHMETIC)
    assert all(ours != theirs for ours, theirs in zip(fresh, odd, strict=True)), "or the test sees nothing"
    assert arithmetic_of(f"{ODD_ARITHMETIC}\nsettle_arithmetic(torch.device('cuda', 1))") == fresh
    on_a_cpu = arithmetic_of(f"{ODD_ARITHMETIC}\nsettle_arithmetic(torch.device('cpu'))")
    assert on_a_cpu == [fresh[0], *odd[1:]], "a program may use GPUs for other things"


@pytest.fixture
def cudnn_attention() -> Iterator[None]:
    """Some other code has switched it on in this process."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("cudnn_attention")
def test_stages_settle_the_arithmetic_of_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary decoding is such a stage, too."""
    model = build_model("llama")
    torch.set_float32_matmul_precision("medium")
    LayerRange(model)
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(PreTrainedModel, "device", property(lambda _: torch.device("cuda", 1)))
    with two_gpus():
        LayerRange(model)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_code_for_gpus_is_compiled_without_cudnns_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that compiles may not have a stage on a GPU yet, and has the code's attention chosen."""
    config, found = build_model("llama", num_layers=2).config, list[bool]()
    program = torch.export.export(torch.nn.Identity(), (torch.zeros(1),))
    monkeypatch.setattr(export, "check_toolkit", lambda: None)
    monkeypatch.setattr(export, "_export", lambda *_: found.append(torch.backends.cuda.cudnn_sdp_enabled()) or program)
    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", lambda *_, **__: None)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for device in ("cpu", "cuda"):
            torch.backends.cuda.enable_cudnn_sdp(True)
            make = lambda: export.layer_for(without_weights(config, torch.bfloat16), 0, 1)  # noqa: E731
            export._compile("layer 0", make, 0, None, torch.bfloat16, torch.device(device), 1, tmp_path / "code.pt2")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert found == [True, False]


def test_one_rows_products_are_tuned_on_gpus_alone() -> None:
    """Code that is compiled with other options has another name, or an earlier run's would be taken."""
    config = build_model("llama", num_layers=2).config
    kinds = (PassKind.ONE, PassKind.WITHOUT_MLP, PassKind.SEVERAL, 4)
    for device, tuned in (("cuda", [True, True, False, False]), ("cpu", [False] * 4)):
        options = [compiler_options(torch.device(device), kind) for kind in kinds]
        assert ["coordinate_descent_tuning" in found for found in options] == tuned
        assert options[0] is not compiler_options(torch.device(device), kinds[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda device: "a stand-in")
        (before, *_) = export.layer_parts(config, torch.bfloat16, torch.device("cuda"))
        patch.setattr(export, "compiler_options", lambda device, passes: {})
        (after, *_) = export.layer_parts(config, torch.bfloat16, torch.device("cuda"))
    assert before.name != after.name


@pytest.mark.parametrize("window", [None, 16])
def test_several_tokens_read_a_gpus_keys_where_they_lie(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's fast attention takes no mask together with `enable_gqa`: heads that share keys have a stride of 0."""
    config, programs_of = build_model("llama", num_layers=2).config, []
    assert config.num_attention_heads > config.num_key_value_heads
    monkeypatch.setattr(export.native, "is_available", lambda device, dtype: False)
    make = lambda: export.layer_for(without_weights(config, torch.float32), 0, PassKind.SEVERAL)  # noqa: E731
    for on_gpu_too in (True, False):
        monkeypatch.setattr(programs, "_is_on_gpu", lambda tensor, there=on_gpu_too: there)
        programs_of.append(export._export(make, 0, window, torch.float32, torch.device("cpu"), PassKind.SEVERAL))
    on_gpus, on_cpus = programs_of
    for program, shares in ((on_gpus, False), (on_cpus, True)):
        (node,) = [node for node in program.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        assert bool(node.kwargs.get("enable_gqa")) == shares
        strides = [given.meta["val"].stride(1) for given in node.args[1:3]]
        assert (strides == [0, 0]) != shares


def test_attention_over_keys_where_they_lie_is_the_librarys() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 5, 8, 16, generator=generator).transpose(1, 2)
    key, value = torch.randn(2, 72, 2, 16, generator=generator).transpose(1, 2)[:, None]
    mask = torch.where(torch.arange(72) > torch.arange(40, 45)[:, None], -torch.inf, 0.0)[None, None]
    for scale in (None, 0.3):
        ours = programs._attention_of_groups(query, key, value, mask, scale)
        options = {"attn_mask": mask, "scale": scale, "enable_gqa": True}
        theirs = nn.functional.scaled_dot_product_attention(query, key, value, **options)
        torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_what_leaves_a_gpu_goes_by_pinned_memory() -> None:
    """In one piece, with the same bytes; what is on the CPU leaves from where it lies."""
    hidden = torch.arange(24.0).view(1, 4, 6)[:, :, :5]
    wanted = [bytes(frame) for frame in encode(ExitState(DECIDER, 1, 2, hidden.contiguous()))]
    with NewTensors() as new:
        assert [bytes(frame) for frame in encode(ExitState(DECIDER, 1, 2, on_gpu(hidden, 1)))] == wanted
        assert new.pinned == 1
        encode(ExitState(DECIDER, 1, 2, hidden))
        assert new.pinned == 1


class _AnotherWayEachTime(TorchFunctionMode):
    """Running sums over a GPU's numbers come out another way each time, as CUDA's may."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") == "cumsum" and args[0].is_cuda:
            self.sums += 1
            return result + 1e-3 * (-1) ** self.sums
        return result


@pytest.mark.parametrize("top_k", [0, 5])
def test_the_token_at_top_ps_border_is_the_same_each_time(top_k: int) -> None:
    """Four tokens of a quarter each, and a border where the second one ends."""
    logits = torch.full((8,), -20.0)
    logits[:4] = 0.0
    for temperature in (1.0, 0.7):
        for seed in range(20):
            sampler = Sampler(SamplingParams(temperature=temperature, top_p=0.5, top_k=top_k, seed=seed))
            with _AnotherWayEachTime():
                tokens = {sampler.choose(on_gpu(logits, 1), [1, 2]) for _ in range(4)}
                scores = [sampler.noisy_scores(on_gpu(logits, 1), [1, 2]) for _ in range(2)]
                chances = [sampler.distribution(on_gpu(logits, 1), [1, 2]) for _ in range(2)]
            assert tokens == {sampler.choose(logits, [1, 2])}
            assert torch.equal(*scores)
            assert torch.equal(*chances)


_WAIT_FOR_A_DEVICE = {
    f"torch.cuda.{name}" for name in ("synchronize", "graph", "graphs.graph", "make_graphed_callables")
}


def complaints(source: str) -> list[str]:
    """Names by which code would wait for a whole device, whatever it calls them: recording waits for it, too."""
    tree, known = ast.parse(source), dict[str, str]()

    def whole(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{whole(node.value)}.{node.attr}"
        return known.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {name.asname: name.name for name in node.names if name.asname}
        elif isinstance(node, ast.ImportFrom):
            known |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (name := whole(node.value)):
            known[node.targets[0].id] = name
    loaded = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)]
    used = {whole(node) for node in loaded if isinstance(node.ctx, ast.Load)}
    return sorted(used & _WAIT_FOR_A_DEVICE)


def test_nobody_waits_for_a_device() -> None:
    sources = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "benchmarks").rglob("*.py")]
    assert len(sources) > 150
    assert {path.name: found for path in sources if (found := complaints(path.read_text()))} == {}
