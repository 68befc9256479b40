# SPDX-License-Identifier: Apache-2.0
"""The logic of the notebooks in notebooks/latent_moe_tail: correctness, tuning, performance."""
