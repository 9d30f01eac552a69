"""`python -m cs_kernels check`: finds out whether the kernels are right on this machine.

`cases` has the checks, which run in child processes (`child`) under a watchdog (`watchdog`);
`record` makes the table, the advice and the JSON file.
"""
