"""A plain-torch forward of OLMo-core's stock MoE block, as the reference for exports.

The stock one needs TransformerEngine. Independent of the project's own blocks on purpose.
"""

from __future__ import annotations

import torch


def block_forward(self, x, *, loss_div_factor=None, **kwargs):
    """Replacement for `OLMoDDPTransformerBlock.combined_forward_no_ep`."""
    attended = self._res_norm_attn(x, **kwargs)
    weights_BTK, indices_BTK, _, _ = self.routed_experts_router(
        attended, False, loss_div_factor=loss_div_factor
    )
    experts = self.routed_experts
    flat_ND = attended.reshape(-1, attended.shape[-1])
    top_k = indices_BTK.shape[-1]
    weights_NK, indices_NK = weights_BTK.reshape(-1, top_k), indices_BTK.reshape(-1, top_k)
    outputs = torch.zeros(*indices_NK.shape, flat_ND.shape[1], dtype=x.dtype)
    for expert in range(experts.w_down.shape[0]):
        rows, slots = (indices_NK == expert).nonzero(as_tuple=True)
        hidden = experts.chunk_and_activate(flat_ND[rows] @ experts.w_up_gate[expert].T)
        outputs[rows, slots] = hidden @ experts.w_down[expert]
    routed = (outputs.float() * weights_NK.float()[..., None]).sum(1).to(x.dtype).view_as(x)
    shared = None
    if self.shared_experts is not None:
        shared = self._mix_shared_out(self.shared_experts(attended), None, x.shape)
    merged = self._merge_routed_and_shared(routed, shared)
    return self._res_norm_mlp(attended, merged)


def core_logits(module):
    """Logits of a stock model whose blocks run `block_forward`."""
    return lambda ids_BT: module(ids_BT)
