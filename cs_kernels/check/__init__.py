"""`python -m cs_kernels check`: whether the kernels are right on this machine.

`cases` has the checks, each of which runs in a child process (`child`) under a watchdog
(`watchdog`); `record` makes the table, the advice and the JSON file.
"""
