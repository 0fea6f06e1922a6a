"""The jobs of one device: in this process, or in a process of their own.

`device_host.py` has the threads of the jobs and the stage of the device. `device_process.py` is the
same behind a pipe. `input_process.py` starts the process that reads for several devices.

May import: fleet.deciding, fleet.inputs, fleet.jobs, loaders.sharing, random_state.
"""
