# SPDX-License-Identifier: Apache-2.0
"""How fast the emulator is: four kernels, each checked before its rate counts.

These are times of the emulator on this computer; they say nothing about a chip.
"""
