# What the targets flashinfer_tvm and flashinfer_tvm_shared need of programs that link them; the same in
# a build of the library and in its package config.

# Nothing calls what registers the functions, so the linker must be told to keep it. In the archive it
# is one object file, found by a symbol of its own.
function(tvm_flashinfer_keep_registration target)
    set_property(
        TARGET ${target}
        APPEND
        PROPERTY
            INTERFACE_LINK_OPTIONS "LINKER:--undefined=tvm_flashinfer_register"
    )
endfunction()

# A target for the shared library that is not dropped by --as-needed, the default of many systems.
function(tvm_flashinfer_add_shared name library)
    add_library(${name} INTERFACE IMPORTED GLOBAL)
    set_target_properties(
        ${name}
        PROPERTIES
            INTERFACE_LINK_LIBRARIES
                "-Wl,--push-state,--no-as-needed,$<TARGET_FILE:${library}>,--pop-state;${library}"
    )
endfunction()
