# SPDX-License-Identifier: Apache-2.0
"""What can be measured: one module for each operator, with its workload and its arms."""
