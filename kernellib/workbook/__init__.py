# SPDX-License-Identifier: Apache-2.0
"""Runs notebooks headlessly, judges them by their artifacts, and renders what they show.

- ``artifact``: what a notebook leaves behind (claims, data) and how it asserts its claims;
- ``discovery``, ``parameters``, ``engine``, ``runner``, ``report``: the papermill runner behind
  ``python -m kernellib.workbook``;
- ``display``, ``widgets``: tables, figures and control panels that notebooks share;
- ``latent_moe_tail``: the logic of that operator's notebooks.

Needs the extra ``notebooks``: ``pip install 'kernellib[notebooks]'``.
"""

# Set in every kernel the runner starts; widgets then leave only their static output.
HEADLESS_VARIABLE = "KERNELLIB_HEADLESS"
