"""What `cadenza audit` makes of real steps: kernels by class, a trace read, how many layers fit.

Names are as profiles of PyTorch on NVIDIA's and AMD's GPUs record them, cut where they get long.
"""

import io
from dataclasses import replace

import pytest
import torch
from audited import classifier, predicted, subject
from rich.console import Console
from torch import nn

from cadenza.tools.audit import measure as measuring
from cadenza.tools.audit.fakes import fake
from cadenza.tools.audit.measure import by_class, held, longest, measure, step_of, that_fits
from cadenza.tools.audit.options import AuditOptions
from cadenza.tools.audit.parts import Model
from cadenza.tools.audit.profile import Kernel, kernels_of
from cadenza.tools.audit.report import Report
from cadenza.tools.audit.sorting import sort_kernel
from cadenza.tools.audit.tables import show

pytestmark = pytest.mark.slow

NAMES = {
    "products": [
        "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "nvjet_hsh_256x128_64x4_2x1_v_bz_TNN",
        "nvjet_qqtst_128x256_128x4_1x2_h_bz_coopA_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>(P)",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::k>",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize96x128x32_stage4_warpsize2x2x1",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, __nv_bfloat16, float>()",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float>()",
        "triton_tem_fused_mm_2",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>()",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, cutlass::Kernel>(Flash_bwd_params)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<gemm>>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
        "triton_tem_fused_flex_attention_0",
    ],
    "memory": [
        "triton_poi_fused__to_copy_add_mm_mul_silu_3",
        "triton_red_fused__to_copy_add_addmm_mean_mul_pow_rsqrt_1",
        "triton_per_fused_native_layer_norm_0",
        "triton_poi_fused__scaled_dot_product_flash_attention_clone_4",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>>",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::Ten)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps>>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>>",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>()",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>()",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, "
        "at::native::(anonymous namespace)::FusedAdamMathFunctor<c10::BFloat16, 4>>",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ],
    "other": ["mystery_kernel(float*)"],
}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in NAMES.items() for n in names])
def test_kernels_are_sorted_by_name(kind, name):
    assert sort_kernel(name) == kind


def test_kernels_of_no_telling_name_are_sorted_by_what_launched_them():
    assert sort_kernel("mystery", ["aten::mm", "aten::linear"]) == "products"
    assert sort_kernel("mystery", ["aten::silu"]) == "memory"
    assert sort_kernel("mystery", ["c10d::allreduce_"]) == "communication"
    assert sort_kernel("mystery", ["aten::_scaled_dot_product_flash_attention"]) == "attention"
    step = ["aten::_foreach_mul_", "Optimizer.step#AdamW.step"]
    assert sort_kernel("void at::native::vectorized_elementwise_kernel<4>", step) == "optimizer"


def test_our_kernels_say_what_they_are():
    assert sort_kernel("cadenza_F1_product") == "products"
    assert sort_kernel("cadenza_vector_product") == "products"
    assert sort_kernel("cadenza_B2_pointwise") == "memory"
    assert sort_kernel("cadenza_v7_vectors") == "memory"
    assert sort_kernel("cadenza_dot_product_vectors") == "memory"
    assert sort_kernel("kernel_of_someone") == "other"


# --- a trace --------------------------------------------------------------------------------------


def event(category, name, start, length, tid=1, **arguments):
    return {
        "ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": tid,
        "args": arguments,
    }  # fmt: skip


TRACE = [
    {"ph": "M", "name": "process_name"},
    event("cpu_op", "aten::linear", 0.0, 50.0),
    event("cpu_op", "aten::mm", 5.0, 20.0),
    event("cuda_runtime", "cudaLaunchKernel", 10.0, 5.0, correlation=7),
    event("user_annotation", "Optimizer.step#AdamW.step", 60.0, 30.0),
    event("cpu_op", "aten::_fused_adamw_", 62.0, 20.0),
    event("cuda_driver", "cuLaunchKernelEx", 70.0, 2.0, correlation=8),
    event("cuda_driver", "cuLaunchKernelEx", 95.0, 2.0, tid=2, correlation=9),
    event("kernel", "unheard_of", 100.0, 300.0, tid=3, correlation=7),
    event("kernel", "unheard_of", 500.0, 40.0, tid=3, correlation=8),
    event("kernel", "cadenza_F1_product", 410.0, 80.0, tid=3, correlation=9),
    event("gpu_memset", "Memset (Device)", 560.0, 2.0, tid=3, correlation=10),
    event("python_function", "step", 0.0, 100.0),
]


def test_a_trace_is_its_kernels_in_order_with_their_origins():
    assert kernels_of(TRACE) == [
        Kernel("unheard_of", "products", pytest.approx(300e-6)),
        Kernel("cadenza_F1_product", "products", pytest.approx(80e-6)),
        Kernel("unheard_of", "optimizer", pytest.approx(40e-6)),
        Kernel("Memset (Device)", "memory", pytest.approx(2e-6)),
    ]


def test_times_are_those_of_one_step():
    kernels = kernels_of(TRACE)
    expected = {"products": 0.19, "optimizer": 0.02, "memory": 0.001}
    assert by_class(kernels, 2) == pytest.approx(expected)
    first, *_ = longest(kernels, 2)
    assert first == {"name": "unheard_of", "class": "products", "ms": pytest.approx(0.15)}
    assert len(longest(kernels, 2, most=1)) == 1


# --- steps ----------------------------------------------------------------------------------------


def test_a_step_trains_the_model():
    module, batch = classifier()
    before = module.head.weight.detach().clone()
    step = step_of(Model(module, (), batch), compiled=False)
    step()
    assert not torch.equal(module.head.weight, before)
    assert module.head.weight.grad is None


def test_what_a_part_holds_is_its_states_and_what_backward_needs():
    with fake():
        layer = nn.Linear(64, 96, bias=False)
        (part,) = Model(layer, (torch.empty(32, 64, requires_grad=True),), {}).parts()
        assert held(part) == 4 * (4 * 96 * 64 + 32 * 64)


def test_as_many_layers_run_as_fit():
    with fake():
        parts = subject().before().parts()
        layer, rest = held(parts[0]), held(parts[-1])
    room = [int((2 * rest + n * layer + layer / 2) / 0.85) for n in (0, 2, 99)]
    assert [that_fits(subject(), memory).decoder.layers for memory in room] == [1, 2, 3]


@pytest.fixture
def measured(monkeypatch):
    """Two variants, measured as if on a GPU: the first runs, the second fails."""

    def one(subject, variant, steps, device):
        if variant == "cadenza":
            raise RuntimeError("no kernel\nfor it")
        times = {"ms": 2.0, "classes": {"products": 1.5, "other": 0.5}}
        return {"quartiles": [1.9, 2.0, 2.1], "measured": times, "kernels": []}

    monkeypatch.setattr(measuring, "_measured", one)
    monkeypatch.setattr(measuring, "device_name", lambda device: "H100")
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    return measure(subject(), predicted(), ["compiled", "cadenza"], 5)


def test_a_variant_that_fails_is_a_record_with_its_reason(measured):
    ran, failed = measured
    assert ran["predicted"]["ms"] == 1e3 * predicted().step("compiled", "bf16").total
    assert failed["failed"] == "RuntimeError: no kernel"
    assert {one["layers"] for one in measured} == {3}


def test_what_was_not_predicted_says_why(measured, monkeypatch):
    """And no step of it is taken: the reason is that of the prediction, not a missing key."""
    monkeypatch.setattr(measuring, "_measured", None)  # it would fail
    some = {n: c for n, c in predicted().variants.items() if n != "compiled"}
    known = replace(predicted(), variants=some, missing={"compiled": "a graph break"})
    (record,) = measure(subject(), known, ["compiled"], 5)
    assert record["failed"] == "not predicted: a graph break"


def test_what_was_measured_stands_beside_what_was_predicted(measured):
    out = io.StringIO()
    report = Report("a", [], predicted(), AuditOptions(), measured)
    show(report, Console(file=out, highlight=False))
    said = out.getvalue()
    assert "measured on H100, 3 layers" in said
    ratio = 2.0 / (1e3 * predicted().step("compiled", "bf16").total)
    assert f"{ratio:.2f}" in said
    assert "RuntimeError: no kernel" in said


def test_savings_are_those_measured_where_all_layers_were(measured):
    both = [measured[0], {**measured[0], "variant": "cadenza", "quartiles": [0.9, 1.0, 1.1]}]
    report = Report("a", [], predicted(), AuditOptions(), both)
    assert report.saving("bf16").share == pytest.approx(0.5)
    assert report.saving("fp8").share == pytest.approx(predicted().saved("fp8"))
    fewer = replace(report, measured=[{**one, "layers": 2} for one in both])
    assert fewer.saving("bf16").share == pytest.approx(predicted().saved("bf16"))
