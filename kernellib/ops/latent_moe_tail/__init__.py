# SPDX-License-Identifier: Apache-2.0
"""The latent MoE tail: RMSNorm of a latent row, its up-projection and the shared-expert add, fused."""
