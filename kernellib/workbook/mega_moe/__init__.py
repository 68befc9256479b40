# SPDX-License-Identifier: Apache-2.0
"""The logic of MegaMoE's notebooks."""
