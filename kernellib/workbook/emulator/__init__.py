# SPDX-License-Identifier: Apache-2.0
"""Logic of the notebooks in ``notebooks/emulator``."""
