# The target tvm_flashinfer::tvm_ffi: headers and library of tvm-ffi. Inside of TVM's own tree, or of a
# project that has found tvm-ffi before, they are those; else those of the wheel apache-tvm-ffi. Not by
# find_package(tvm_ffi): its config makes targets of fixed names, and cannot be read a second time.
if(NOT TARGET tvm_flashinfer::tvm_ffi)
    set(_tvm_ffi "")
    foreach(_name tvm_ffi::shared tvm_ffi_shared)
        if(TARGET ${_name} AND NOT _tvm_ffi)
            set(_tvm_ffi ${_name})
        endif()
    endforeach()
    if(_tvm_ffi)
        add_library(tvm_flashinfer::tvm_ffi INTERFACE IMPORTED GLOBAL)
        target_link_libraries(tvm_flashinfer::tvm_ffi INTERFACE ${_tvm_ffi})
        message(STATUS "tvm_flashinfer: tvm-ffi is the target ${_tvm_ffi}")
    else()
        find_package(Python COMPONENTS Interpreter REQUIRED)
        foreach(_option includedir dlpack-includedir libfiles)
            execute_process(
                COMMAND "${Python_EXECUTABLE}" -m tvm_ffi.config --${_option}
                OUTPUT_VARIABLE _tvm_ffi_${_option}
                OUTPUT_STRIP_TRAILING_WHITESPACE
                RESULT_VARIABLE _tvm_ffi_result
                ERROR_VARIABLE _tvm_ffi_error
            )
            if(NOT _tvm_ffi_result EQUAL 0)
                message(
                    FATAL_ERROR
                    "${Python_EXECUTABLE} has no tvm-ffi: run `pip install apache-tvm-ffi` for it, or name another Python with -DPython_EXECUTABLE.\n${_tvm_ffi_error}"
                )
            endif()
        endforeach()
        add_library(tvm_flashinfer::tvm_ffi SHARED IMPORTED GLOBAL)
        set_target_properties(
            tvm_flashinfer::tvm_ffi
            PROPERTIES
                IMPORTED_LOCATION "${_tvm_ffi_libfiles}"
                INTERFACE_INCLUDE_DIRECTORIES
                    "${_tvm_ffi_includedir};${_tvm_ffi_dlpack-includedir}"
                INTERFACE_COMPILE_FEATURES cxx_std_17
        )
        message(
            STATUS
            "tvm_flashinfer: tvm-ffi of ${Python_EXECUTABLE} is ${_tvm_ffi_libfiles}"
        )
    endif()
endif()
