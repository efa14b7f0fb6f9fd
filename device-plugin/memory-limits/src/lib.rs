//! Reads from the GPU driver the memory limit of a cgroup on a GPU, and the memory that the cgroup's processes use under it.
//!
//! The function of NVML is `nvmlDeviceGetMemoryLimits_v1`, which drivers have from version 615 on. It needs no privilege.
//! `nvml-wrapper` does not have it, so this crate looks the function up in the library that `nvml-wrapper` has opened. No other
//! crate of this workspace has `unsafe` code.

use std::ffi::{CString, c_char, c_uint, c_ulonglong, c_void};
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_try};

/// The function's name in the library.
const SYMBOL: &[u8] = b"nvmlDeviceGetMemoryLimits_v1\0";

/// `NVML_DEVICE_MEMORY_LIMIT_MAX`, the number that stands for "no limit".
const NO_LIMIT: c_ulonglong = c_ulonglong::MAX;

/// The function's type in `nvml.h`: an `nvmlDevice_t` is a pointer, an `nvmlReturn_t` an enumeration without negative numbers.
type GetMemoryLimits = unsafe extern "C" fn(device: *mut c_void, limits: *mut RawLimits) -> c_uint;

/// `nvmlGetMemoryLimits_v1_t` of `nvml.h`, and room behind it. `name_space` takes the path of the cgroup.
#[repr(C)]
struct RawLimits {
    name_space: *const c_char,
    soft_limit: c_ulonglong,
    hard_limit: c_ulonglong,
    current_used: c_ulonglong,
    /// NVIDIA's guide shows more fields than the header does. A library that wrote them would write here, and not into other
    /// memory.
    room: [c_ulonglong; 12],
}

// The layout of the header of CUDA 13.4. A build for another layout, such as that of a 32-bit machine, fails here.
const _: () = assert!(
    offset_of!(RawLimits, name_space) == 0
        && offset_of!(RawLimits, soft_limit) == 8
        && offset_of!(RawLimits, hard_limit) == 16
        && offset_of!(RawLimits, current_used) == 24
        && offset_of!(RawLimits, room) == 32
);

/// The answer of a driver about one cgroup on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupMemory {
    /// A limit is set for the cgroup.
    Limited {
        /// The bytes that the cgroup's processes use on the GPU.
        used: u64,
        /// The bytes beyond which an allocation fails; `None` if the cgroup has only a soft limit (memory that is kept for it).
        limit: Option<u64>,
    },
    /// No limit is set for the cgroup, or the driver cannot limit memory on this GPU.
    NotLimited,
    /// The library is that of a driver before version 615, which does not have the function.
    NoFunction,
}

/// Asks the driver for the memory of a cgroup on a GPU. `cgroup` is the cgroup's directory as this process sees it.
///
/// # Errors
/// NVML's error, except those by which NVML says that no limit is set.
pub fn cgroup_memory(device: &Device<'_>, cgroup: &Path) -> Result<CgroupMemory, NvmlError> {
    let path = CString::new(cgroup.as_os_str().as_bytes())?;
    // The library of the session to which the device belongs, so that no handle gets into another library.
    let library = &device.nvml().lib().__library;
    // SAFETY: in libnvidia-ml the name belongs to the function of NVML, whose type `GetMemoryLimits` is; the suffix `_v1` is
    // that of the layout of `RawLimits`. `Option` of a function pointer has the size of a pointer, and is `None` for the null
    // pointer.
    let symbol = unsafe { library.get::<Option<GetMemoryLimits>>(SYMBOL) };
    // The function pointer outlives the symbol. The library stays loaded: `device` borrows the session that unloads it at its
    // end.
    let Ok(&Some(get_memory_limits)) = symbol.as_deref() else {
        return Ok(CgroupMemory::NoFunction);
    };
    let mut limits = RawLimits {
        name_space: path.as_ptr(),
        soft_limit: 0,
        hard_limit: 0,
        current_used: 0,
        room: [0; 12],
    };
    // SAFETY: the method copies the handle. The handle is used below, while `device` borrows the session (`Nvml`) in which it is
    // valid: the session initialised NVML when it began, and only its end shuts NVML down.
    let handle = unsafe { device.handle() };
    // SAFETY: the function is that of the session's library, and the handle one of the session. `limits` is writable, larger than
    // the structure that the function writes, and borrowed by nothing else. `path` is a string that ends with a zero byte and
    // lives until the end of this function; NVML keeps no pointer to it. NVML may be called from several threads at once.
    let code = unsafe { get_memory_limits(handle.cast(), &raw mut limits) };
    match nvml_try(code) {
        // NVML's documentation of the structure calls these two numbers "no limit". The use beside them may be a parent cgroup's.
        Ok(()) if limits.soft_limit == 0 && limits.hard_limit == NO_LIMIT => Ok(CgroupMemory::NotLimited),
        Ok(()) => Ok(CgroupMemory::Limited {
            used: limits.current_used,
            limit: (limits.hard_limit != NO_LIMIT).then_some(limits.hard_limit),
        }),
        Err(NvmlError::NotFound | NvmlError::NotSupported) => Ok(CgroupMemory::NotLimited),
        Err(error) => Err(error),
    }
}
