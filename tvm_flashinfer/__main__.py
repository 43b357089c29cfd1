"""``python -m tvm_flashinfer`` is the command line."""

from tvm_flashinfer.cli import main

if __name__ == "__main__":
    main(prog_name="tvm-flashinfer")
