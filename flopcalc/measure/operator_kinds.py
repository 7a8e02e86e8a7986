"""The kinds of operators that a step dispatches: their names, and how a name is classified."""

from __future__ import annotations

# Kind -> names without their namespace. An in-place form (mul_) is of the kind of its plain form unless it is listed.
KINDS: dict[str, tuple[str, ...]] = {
    kind: tuple(names.split())
    for kind, names in {
        # No kernel: another look at the same memory.
        "view": "view t transpose permute expand slice select unsqueeze squeeze detach alias as_strided split "
        "split_with_sizes unbind _unsafe_view _reshape_alias diagonal unfold view_as_real view_as_complex real imag "
        "set_ resize_ unsafe_split unsafe_chunk swapaxes",
        # No kernel: memory alone.
        "make": "empty empty_like empty_strided new_empty new_empty_strided",
        # Operators that only call others; the profiler shows them, a trace below autograd does not.
        "wrapper": "linear matmul to reshape contiguous type_as flatten chunk narrow dropout layer_norm rms_norm "
        "softmax log_softmax cross_entropy_loss nll_loss nll_loss_nd one_hot expand_as view_as numpy_T movedim "
        "conv1d conv2d conv3d unflatten clip square pad scaled_dot_product_attention result_type item is_nonzero "
        "concat concatenate hstack vstack",
        "fill": "zeros full ones fill_ zero_ zeros_like ones_like full_like new_zeros new_ones new_full arange "
        "linspace scalar_tensor eye fill",
        "cast": "_to_copy",
        "copy": "clone copy_ copy repeat repeat_interleave roll flip slice_backward select_backward slice_scatter "
        "select_scatter as_strided_scatter unfold_backward view_copy expand_copy _reshape_copy im2col col2im "
        "constant_pad_nd reflection_pad2d reflection_pad2d_backward reflection_pad3d pixel_shuffle pixel_unshuffle "
        "replication_pad1d replication_pad1d_backward replication_pad2d replication_pad3d replication_pad3d_backward "
        "tril triu split_with_sizes_copy diag_embed",
        "cat": "cat stack",
        "reduce": "mean sum any all amax amin max min var std prod norm linalg_vector_norm logsumexp argmax argmin "
        "var_mean _is_all_true _is_any_true count_nonzero aminmax nansum std_mean",
        "norm": "native_layer_norm _fused_rms_norm native_group_norm native_batch_norm _native_batch_norm_legit "
        "_weight_norm_interface linalg_qr",
        "norm_backward": "native_layer_norm_backward _fused_rms_norm_backward native_group_norm_backward "
        "native_batch_norm_backward _weight_norm_interface_backward",
        "softmax": "_softmax _safe_softmax _log_softmax",
        "softmax_backward": "_softmax_backward_data _log_softmax_backward_data",
        "gather": "embedding index index_select gather _unsafe_index masked_select grid_sampler_2d upsample_bilinear2d "
        "upsample_bicubic2d upsample_nearest2d upsample_linear1d upsample_trilinear3d _upsample_bilinear2d_aa "
        "_upsample_bicubic2d_aa avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d _upsample_nearest_exact2d "
        "upsample_nearest3d avg_pool3d _embedding_bag _embedding_bag_forward_only",
        "embedding_backward": "embedding_dense_backward _embedding_bag_backward "
        "_embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward",
        "scatter": "index_put _index_put_impl_ index_add scatter scatter_add scatter_reduce "
        "masked_scatter masked_scatter_backward index_copy _unsafe_index_put index_fill grid_sampler_2d_backward "
        "upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_nearest2d_backward "
        "upsample_linear1d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward "
        "avg_pool2d_backward max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward "
        "_upsample_nearest_exact2d_backward upsample_nearest3d_backward",
        "sort": "topk sort cumsum cumprod cummax cummin histc bincount searchsorted bucketize unique_consecutive "
        "_unique2 unique_dim argsort",
        "loss": "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward",
        "random": "bernoulli exponential normal rand randn randint uniform native_dropout rand_like randn_like",
        # The host waits for a value, or until one of its own has come over.
        "read": "_local_scalar_dense nonzero equal lift_fresh is_same_size",
        "optimizer": "_foreach_add_ _foreach_zero_ _fused_adamw_",
        "fourier": "_fft_r2c _fft_c2c _fft_c2r",
        "product": "mm addmm bmm baddbmm _grouped_mm grouped_mm_fallback convolution convolution_backward dot vdot mv "
        "addmv _scaled_mm _int_mm linalg_solve_triangular _convolution cudnn_convolution slow_conv2d_forward "
        "_slow_conv2d_forward slow_conv3d_forward slow_conv3d convolution_overrideable",
        "attention": "attend attend_backward _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
        "_flash_attention_forward _flash_attention_backward _efficient_attention_forward _efficient_attention_backward "
        "_cudnn_attention_forward _cudnn_attention_backward _scaled_dot_product_fused_attention_overrideable "
        "_scaled_dot_product_fused_attention_overrideable_backward",
        "pointwise": "add sub rsub mul div addcmul addcdiv neg abs sign exp exp2 expm1 log log2 log1p sqrt rsqrt "
        "reciprocal pow sin cos tan tanh sigmoid silu gelu relu relu6 leaky_relu elu softplus mish hardtanh hardswish "
        "hardsigmoid erf ceil floor round trunc frac clamp clamp_min clamp_max minimum maximum fmod remainder "
        "floor_divide eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or "
        "bitwise_not bitwise_xor where masked_fill lerp isnan isinf isfinite isin polar glu log_sigmoid_forward "
        "threshold sgn atan2 sinh cosh asin acos atan nan_to_num __and__ __or__ __xor__ bitwise_left_shift "
        "bitwise_right_shift __lshift__ __rshift__ "
        "silu_backward gelu_backward sigmoid_backward tanh_backward threshold_backward elu_backward "
        "leaky_relu_backward softplus_backward hardtanh_backward hardswish_backward mish_backward glu_backward "
        "log_sigmoid_backward hardsigmoid_backward native_dropout_backward _prelu_kernel _prelu_kernel_backward",
    }.items()
}
# Parts of the names of modules that make rotary embeddings: none of their products is work of the model.
ROTARY = ("RotaryEmbedding", "MRoPE")
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}


def classify(name: str) -> str:
    """The kind of an operator ('aten::mul', 'aten.mul.Tensor', 'mul_' -> 'pointwise'); 'other' if it is not known."""
    short = name.rpartition("::")[2]
    short = short.split(".")[1] if short.startswith(("aten.", "transformers.", "flopcalc.")) else short.split(".")[0]
    found = _KIND_OF.get(short)
    if found is None and short.endswith("_") and not short.endswith("__"):
        found = _KIND_OF.get(short[:-1])
    return found or "other"
