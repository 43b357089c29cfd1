# find_package(tvm_flashinfer): the targets flashinfer_tvm (static) and flashinfer_tvm_shared, and the
# same under tvm_flashinfer::. Both register the functions flashinfer.* with tvm-ffi when the program
# starts; link one of them. The Python that has the package knows this folder:
# python -m tvm_flashinfer --cmake-dir. With all paths relative to this file the package may be moved.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include("${CMAKE_CURRENT_LIST_DIR}/TvmFfi.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/Targets.cmake")

get_filename_component(
    _tvm_flashinfer_root
    "${CMAKE_CURRENT_LIST_DIR}/.."
    ABSOLUTE
)
set(_tvm_flashinfer_lib "${_tvm_flashinfer_root}/lib")
if(NOT EXISTS "${_tvm_flashinfer_lib}")
    # In a source checkout the libraries are where the Python package is.
    set(_tvm_flashinfer_lib "${_tvm_flashinfer_root}/tvm_flashinfer/lib")
endif()
foreach(_file libflashinfer_tvm.a libtvm_flashinfer.so)
    if(NOT EXISTS "${_tvm_flashinfer_lib}/${_file}")
        set(tvm_flashinfer_FOUND FALSE)
        set(tvm_flashinfer_NOT_FOUND_MESSAGE
            "${_tvm_flashinfer_lib}/${_file} is missing: install tvm-flashinfer again, or build it in the source checkout."
        )
        return()
    endif()
endforeach()

# Prebuilt kernels, for tvm_flashinfer::LoadKernels; not found where the package has none.
find_file(
    tvm_flashinfer_KERNELS
    libtvm_flashinfer_kernels.so
    PATHS "${_tvm_flashinfer_lib}/kernels/prebuilt"
    NO_DEFAULT_PATH
    DOC "The library of prebuilt CUDA kernels of tvm_flashinfer"
)

if(NOT TARGET tvm_flashinfer::flashinfer_tvm)
    set(_tvm_flashinfer_uses
        "tvm_flashinfer::tvm_ffi;Threads::Threads;${CMAKE_DL_LIBS}"
    )
    add_library(tvm_flashinfer::flashinfer_tvm STATIC IMPORTED GLOBAL)
    set_target_properties(
        tvm_flashinfer::flashinfer_tvm
        PROPERTIES
            IMPORTED_LOCATION "${_tvm_flashinfer_lib}/libflashinfer_tvm.a"
            INTERFACE_INCLUDE_DIRECTORIES "${_tvm_flashinfer_root}/include"
            INTERFACE_LINK_LIBRARIES "${_tvm_flashinfer_uses}"
    )
    tvm_flashinfer_keep_registration(tvm_flashinfer::flashinfer_tvm)

    add_library(tvm_flashinfer::library SHARED IMPORTED GLOBAL)
    set_target_properties(
        tvm_flashinfer::library
        PROPERTIES
            IMPORTED_LOCATION "${_tvm_flashinfer_lib}/libtvm_flashinfer.so"
            INTERFACE_INCLUDE_DIRECTORIES "${_tvm_flashinfer_root}/include"
            INTERFACE_LINK_LIBRARIES tvm_flashinfer::tvm_ffi
    )
    tvm_flashinfer_add_shared(tvm_flashinfer::flashinfer_tvm_shared tvm_flashinfer::library)

    foreach(_name flashinfer_tvm flashinfer_tvm_shared)
        if(NOT TARGET ${_name})
            add_library(${_name} ALIAS tvm_flashinfer::${_name})
        endif()
    endforeach()
endif()
