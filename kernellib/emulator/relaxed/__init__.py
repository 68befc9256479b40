# SPDX-License-Identifier: Apache-2.0
"""Relaxed mode: what the memory model of gfx942/gfx950 allows, chosen by a seed.

See docs/emulator_memory_model.md.
"""
