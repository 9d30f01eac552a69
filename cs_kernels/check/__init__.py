"""`python -m cs_kernels check`: tests whether the kernels are correct on this machine.

`cases` defines the checks, which run in child processes (`child`) under a watchdog (`watchdog`);
`record` makes the table, the advice and the JSON file.
"""
