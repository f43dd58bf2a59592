import pytest

from stepmark.model.kernel_groups import group_of, short_name


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgs)", "communication"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "communication"),
        (
            "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>",
            "communication",
        ),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>", "communication"),
        ("void deep_ep::internode::dispatch<false, 8>", "communication"),
        ("_c10d_functional::all_reduce", "communication"),
        ("triton_poi_fused_all_gather_into_tensor_mul_3", "fused by compile"),
        ("fsdp::all_gather_copy_in", "copies"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64>>", "attention"),
        ("aten::_scaled_dot_product_flash_attention", "attention"),
        ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256E", "norms"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x32x64", "matrix products"),
        ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("aten::bmm", "matrix products"),
        ("sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32", "convolutions"),
        ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32", "convolutions"),
        ("void linearize_index_kernel<long>(at::GenericPackedTensorAccessor)", "indexing"),
        ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 128>", "norms"),
        ("triton_poi_fused_mul_silu_0", "fused by compile"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<>", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("fsdp::chunk_cat", "copies"),
        ("autograd::engine::evaluate_function: TransposeBackward0", "copies"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", "copy kernels"),
        (
            "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>",
            "copy kernels",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add<float>>",
            "elementwise",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps>>",
            "reductions",
        ),
        (
            "vllm::_typeConvert<c10::BFloat16>::exists>::type vllm::fused_add_rms_norm_kernel",
            "norms",
        ),
        (
            "void tensorrt_llm::kernels::quantize_with_block_size<(Type)2, 32, true>"
            "(int, float const*, unsigned int*, flashinfer::QuantizationSFLayout)",
            "other",
        ),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<8>(flashinfer::P)", "attention"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
            "TensorListMetadata<2>, UnaryOpFunctor<long, 2, 1, 1>, Copy<long, long> >()",
            "elementwise",
        ),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)", "other"),
        ("aten::gelu", "other"),
    ],
)
def test_the_group_of_a_name(name: str, group: str) -> None:
    assert group_of(name) == group


def test_a_short_name_has_the_function() -> None:
    name = "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(int*)"
    assert short_name(name) == "multimem_all_reduce_kernel<c10::BFloat16, 16>"
