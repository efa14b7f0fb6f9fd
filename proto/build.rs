//! Compiles the protocols of kubelet and of the container runtime with a pure-Rust protoc, so that a build needs no tool but
//! cargo.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=kubelet");
    println!("cargo::rerun-if-changed=nri");
    if std::env::var_os("CARGO_FEATURE_KUBELET").is_some() {
        let descriptors = protox::compile(["deviceplugin.proto", "podresources.proto"], ["kubelet"])?;
        tonic_prost_build::configure().compile_fds(descriptors)?;
    }
    if std::env::var_os("CARGO_FEATURE_NRI").is_some() {
        let descriptors = protox::compile(["nri.proto", "ttrpc.proto"], ["nri"])?;
        tonic_prost_build::configure().compile_fds(descriptors)?;
    }
    Ok(())
}
