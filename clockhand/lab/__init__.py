"""The two course chapters, checking themselves: every claim is measured on the modules of this project.

Read `claim.py` for what a claim is, then the claims by subject (`norm`, `position`, `attention`, `mlp`, `moe`, `counting`,
`training`), then `run.py` for how they are run. Nothing outside imports this package but the command line.
"""
