# SPDX-License-Identifier: Apache-2.0
"""Turns parsed instructions into closures that act on the registers of a wave group."""
