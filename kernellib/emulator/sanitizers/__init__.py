# SPDX-License-Identifier: Apache-2.0
"""Checks of a running kernel that cost more than a comparison: races, uninitialised data, divergence."""
