//! gRPC of kubelet's sockets, generated from `proto/kubelet/*.proto`. The device plugin and the testbed's kubelet implement
//! servers and clients.

mod generated {
    #![expect(
        missing_docs,
        unused_qualifications,
        clippy::pedantic,
        clippy::allow_attributes,
        clippy::allow_attributes_without_reason,
        reason = "generated code"
    )]

    /// kubelet's device plugin API, v1beta1 (`k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1`).
    pub mod deviceplugin {
        tonic::include_proto!("v1beta1");
    }

    /// kubelet's pod-resources API, v1 (`k8s.io/kubelet/pkg/apis/podresources/v1`).
    pub mod podresources {
        tonic::include_proto!("v1");
    }
}

pub use generated::{deviceplugin, podresources};

/// The version that a [`deviceplugin::RegisterRequest`] has to name; kubelet refuses any other.
pub const DEVICE_PLUGIN_VERSION: &str = "v1beta1";

/// Health of a device that kubelet may allocate.
pub const HEALTHY: &str = "Healthy";

/// Health of a device that kubelet counts in the node's capacity but not in its allocatable amount.
pub const UNHEALTHY: &str = "Unhealthy";

/// Longest message that kubelet reads, in bytes (the default of grpc-go); a longer one ends the stream.
pub const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

#[cfg(test)]
mod tests {
    //! The wire form of what kubelet lists, compared with bytes that kubelet's own types have made.

    use prost::Message;

    use super::podresources::{
        CdiDevice, ClaimResource, ContainerDevices, ContainerResources, DynamicResource,
        ListPodResourcesResponse, PodResources,
    };

    /// Marshalled in Go by `k8s.io/kubelet/pkg/apis/podresources/v1` of Kubernetes 1.36.2.
    const LISTED: &[&str] = &[
        "0aaa010a05747261696e12047465616d1a9a010a046d61696e12170a0e6e76696469612e636f6d2f67707512054750552d31",
        "2a7912076f6e652d6770751a047465616d22680a450a436b38732e6770752e6e76696469612e636f6d2f636c61696d3d6461",
        "6235616235302d643539612d343261362d616631362d6366643436323863306637612d6770752d30120e6770752e6e766964",
        "69612e636f6d1a026e3122056770752d302a0461376632",
    ];

    fn bytes(hexadecimal: &str) -> Vec<u8> {
        let digits: Vec<char> = hexadecimal.chars().collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(&pair.iter().collect::<String>(), 16).unwrap())
            .collect()
    }

    #[test]
    fn a_list_with_a_claim_is_read_as_kubelet_writes_it() {
        let claimed = ClaimResource {
            cdi_devices: vec![CdiDevice {
                name: "k8s.gpu.nvidia.com/claim=dab5ab50-d59a-42a6-af16-cfd4628c0f7a-gpu-0".to_owned(),
            }],
            driver_name: "gpu.nvidia.com".to_owned(),
            pool_name: "n1".to_owned(),
            device_name: "gpu-0".to_owned(),
            share_id: Some("a7f2".to_owned()),
        };
        let container = ContainerResources {
            name: "main".to_owned(),
            devices: vec![ContainerDevices {
                resource_name: "nvidia.com/gpu".to_owned(),
                device_ids: vec!["GPU-1".to_owned()],
                topology: None,
            }],
            dynamic_resources: vec![DynamicResource {
                claim_name: "one-gpu".to_owned(),
                claim_namespace: "team".to_owned(),
                claim_resources: vec![claimed],
            }],
            ..ContainerResources::default()
        };
        let pod = PodResources {
            name: "train".to_owned(),
            namespace: "team".to_owned(),
            containers: vec![container],
        };
        let expected = ListPodResourcesResponse {
            pod_resources: vec![pod],
        };
        let recorded = bytes(&LISTED.concat());
        assert_eq!(
            ListPodResourcesResponse::decode(recorded.as_slice()),
            Ok(expected.clone())
        );
        assert_eq!(expected.encode_to_vec(), recorded);
    }
}
