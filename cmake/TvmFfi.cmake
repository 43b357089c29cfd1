# tvm-ffi of the Python that builds: headers and library come with the wheel apache-tvm-ffi.
find_package(Python COMPONENTS Interpreter REQUIRED)
if(NOT tvm_ffi_DIR)
    execute_process(
        COMMAND "${Python_EXECUTABLE}" -m tvm_ffi.config --cmakedir
        OUTPUT_VARIABLE tvm_ffi_DIR
        OUTPUT_STRIP_TRAILING_WHITESPACE
        RESULT_VARIABLE tvm_ffi_result
        ERROR_VARIABLE tvm_ffi_error
    )
    if(NOT tvm_ffi_result EQUAL 0)
        message(
            FATAL_ERROR
            "${Python_EXECUTABLE} has no tvm-ffi: run `pip install apache-tvm-ffi` for it.\n${tvm_ffi_error}"
        )
    endif()
endif()
find_package(tvm_ffi CONFIG REQUIRED)
message(
    STATUS
    "tvm_flashinfer: tvm-ffi of ${Python_EXECUTABLE} in ${tvm_ffi_DIR}"
)
