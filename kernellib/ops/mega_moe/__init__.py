# SPDX-License-Identifier: Apache-2.0
"""MegaMoE: an expert-parallel mixture-of-experts layer in two fused launches (A8W4, gfx950)."""
