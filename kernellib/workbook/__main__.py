# SPDX-License-Identifier: Apache-2.0
"""``python -m kernellib.workbook``: list and run the notebooks."""

from .cli import main

if __name__ == "__main__":
    main()
